let b = [2]
