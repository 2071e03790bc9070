"""The study of noise with known gold: is a flipped label worth less, or is it worse than that?"""
