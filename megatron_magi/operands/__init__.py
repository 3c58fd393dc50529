"""What a pass of attention takes and returns (`passes`), its options and checks (`options`), merging (`merge`)."""
