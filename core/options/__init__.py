"""Options: every option of every command, declared once.

`option` defines an option, `table` the class of a command's options, `resolve` finds their values
(flag, environment variable, file, default), and `about` describes them for help, manual pages and
programs. The other modules declare options: `shared`, `calls` and `training` those of several
commands, each of the rest those of one command. The command line, `--help`, the OPTIONS sections of
the manual pages, the keys of TOML files, the checks of combinations and the options recorded in
outputs are all derived from these tables. Standard library only.
"""
