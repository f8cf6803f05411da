"""What a run needs to save while training continues: a thread, and snapshots of the state."""
