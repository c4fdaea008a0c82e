"""How much of a suite a score covers, in words: the same beside every score."""


def outcome(items, coverage):
    """"4 of 5 answered, 1 failed (1 timed_out), 0 not run"."""
    classes = ", ".join(f"{n} {name}" for name, n in sorted(coverage["failures"].items()))
    verdicts = f", {coverage['no_verdict']} without a verdict" if "no_verdict" in coverage else ""
    return (f"{coverage['answered']} of {items} answered, {coverage['failed']} failed"
            f"{f' ({classes})' if classes else ''}{verdicts}, {coverage['not_run']} not run")


def not_complete(*outcomes):
    return "NOT COMPLETE: " + "; ".join(outcomes)
