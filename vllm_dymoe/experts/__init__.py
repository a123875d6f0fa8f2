"""What an expert is and where its bytes are: layout, host store, slots, budget, handles, cache."""
