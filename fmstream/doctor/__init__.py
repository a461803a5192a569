"""The stethoscope: tests of memory, link and machine from the command line.  It sets nothing."""
