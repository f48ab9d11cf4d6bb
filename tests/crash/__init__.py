"""What is left on disk when a run is killed, loses power or meets a failing disk, at any point of a save."""
