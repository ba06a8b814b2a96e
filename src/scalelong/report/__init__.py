"""Pictures of runs, from the files that runs wrote."""
