"""What every other folder uses: errors, the command line, options, files. No torch.

errors             `UserError`, and how a program ends with one
options            how an option is declared: a flag, a TOML key, its help and its check
cli                the parser and the version of every program, numbers with units
console            the commands of an installed Trine
paths              files and folders that a program writes, checked before its work
regular_files      opens a file that may be a stranger's: regular files only, of limited size
module_program     a module of the tree as a process of its own, in a clone and installed
child_environment  the environment of a command that a run starts for its user
"""
