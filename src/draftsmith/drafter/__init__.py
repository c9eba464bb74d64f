"""The draft model itself: its configuration and its forward (Llama form and MLA form)."""
