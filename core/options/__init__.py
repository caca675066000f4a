"""Options: every option of every command, declared once.

`option` says what an option is, `table` puts options together into the table of a command,
`resolve` finds their values (flag > variable > file > default), `about` describes them for help,
manual pages and programs. The other modules declare: `shared`, `calls` and `training` what several
commands have, the rest a command each. From these tables come the command line, `--help`, the
OPTIONS of the manual pages, the keys of TOML files, the refusal of what has no meaning, and what an
output records. Standard library only.
"""
