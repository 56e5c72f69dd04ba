"""The strict readers of YAML and JSON; every file that users pass is read here."""
