"""The base of all packages: keys, errors, files, progress, plugins and recursions."""
