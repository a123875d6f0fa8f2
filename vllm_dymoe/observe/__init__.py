"""What a run shows of itself: timelines, and traces of what routers chose."""
