"""What a run shows of itself: traces of what routers chose."""
