"""One file per section; each has `measure(section)`."""
