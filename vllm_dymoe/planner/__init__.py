"""What a layer's step does with its experts: the table, its rule, and the plan."""
