"""When things happen: what a trainer keeps between calls, how a run is prepared, and its loops."""
