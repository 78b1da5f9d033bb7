"""What people and programs see of a process: typed events, and the sinks that show or keep them."""
