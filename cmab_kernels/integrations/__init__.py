"""Our operators in the models of other packages, which are imported only when a function here is called."""
