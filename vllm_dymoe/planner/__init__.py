"""The planner: the table, the rule that decides, and the plan that it writes."""
