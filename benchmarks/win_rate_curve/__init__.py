"""The main job: PPO in AlpacaFarm, and its win-rate curve."""
