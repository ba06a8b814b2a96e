"""The fault scorecard: `make faults`. Cases are in the files of this folder, see harness.py for how to add one."""
