"""Monitors of over-optimization: what tells that gold has fallen, without gold, on methods and labels never seen?"""
