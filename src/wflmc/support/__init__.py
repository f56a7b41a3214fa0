"""What everything else stands on: keys, errors, files, progress, plugins, linear recursions."""
