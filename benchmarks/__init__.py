"""Speed as ratios, each row beside a named peer in the same run: ``make bench``."""
