"""What an expert is and where its bytes are: layout, routing, precisions, budget, slots, and the table with its
rule."""
