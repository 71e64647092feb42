"""The command `python -m common.planner`; what it does is in `common.checks.planner_command`."""

from common.checks.planner_command import main

if __name__ == "__main__":
    main()
