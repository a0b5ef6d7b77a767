"""Words that every floor shares."""
