"""What a process needs of its machine: run directory, devices, processes, scratch directories, package versions."""
