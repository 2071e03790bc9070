"""The evaluation protocol's own validation: is win rate on the 805 instructions a good measuring instrument?"""
