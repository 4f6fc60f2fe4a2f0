"""What was decided before any process started. So far: the decision that a launcher hands to its ranks (`handed`)."""
