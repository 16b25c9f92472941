// Every subcommand, in the order of `linnet --help`: one line each.
LINNET_COMMAND(list)
LINNET_COMMAND(info)
LINNET_COMMAND(check)
LINNET_COMMAND(bench)
LINNET_COMMAND(compare)
LINNET_COMMAND(tasks)
LINNET_COMMAND(analyze)
