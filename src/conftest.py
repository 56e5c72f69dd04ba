"""Doctests of one module: the package is imported before pytest imports the module.

Pytest sets the attributes of packages that it imports first: `penstock.simulate` would be the
package and not the function.
"""

import penstock  # noqa: F401 - imported for its effect
