"""`tfparallel selftest`: on this machine, does every strategy train as one device does?"""
