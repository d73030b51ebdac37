"""Classes for trainers of other libraries, one file for each library. `import fxpipe` imports none of them."""
