"""What is streamed: the weights of a module."""
