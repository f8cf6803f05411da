"""Public models at full size: what fitflax costs compared with a hand-written loop for each."""
