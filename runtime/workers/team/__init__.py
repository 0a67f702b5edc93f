"""The facade, its meetings, words and failures."""
