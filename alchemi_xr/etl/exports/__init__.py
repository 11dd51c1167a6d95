"""One format a module; they do not know each other. See ``etl.exporting``."""
