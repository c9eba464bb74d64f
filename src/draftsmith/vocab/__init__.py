"""The draft vocabulary: chosen once from the captured answers, kept on every later start."""
