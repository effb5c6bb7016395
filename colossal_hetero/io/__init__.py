"""Files and text: JSON with schema versions, atomic writes, pictures, numbers in words. Imports nothing of ours."""
