"""The loops: what a trainer keeps between calls, how a run is set up, and the order in which things happen in a run."""
