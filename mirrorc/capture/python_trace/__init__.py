"""Front end 3: one recorded run in Python, watched (candidate for deletion)."""
