"""Is a graph the model? What do its nodes share and change?"""
