"""The checks and the verdict: will this engine take this pair?"""
