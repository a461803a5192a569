"""The stethoscope: tests of memory, link and machine from the command line.  It reads and measures, and sets nothing."""
