# PyTorch's embedding.


def embedding(case):
    table, ids = case.random("rows D"), torch.randint(0, case["rows"], (case["B"], case["T"]))
    return "functional.embedding", case.work(lambda table: torch.nn.functional.embedding(ids, table), table)
