"""One module a package; each has ``PEERS``, its choices of settings, and imports the package only to prepare one."""
