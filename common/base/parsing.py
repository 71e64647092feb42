"""Settings from the command line and from YAML files, read by TRL's parser of several dataclasses."""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, NoReturn

import yaml
from trl import TrlParser

from common.base.errors import BadInputError, closest, reading, shortened
from common.base.run_config import RunConfig
from common.base.secrets import without_secrets
from common.base.settings import BY_MODEL, GROUPS

HELP_COLUMNS, HELP_INDENT = 100, 34


class ReadableHelp(argparse.ArgumentDefaultsHelpFormatter):
    """Help of at most 100 columns, with types and defaults, without the spelling with dashes."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=HELP_COLUMNS, max_help_position=HELP_INDENT)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip().split("\n\n")  # those with indented lines are commands, and stay as they are
        return "\n\n".join(each if "\n " in each else fill(" ".join(each.split()), width) for each in paragraphs) + "\n"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return getattr(action.type, "__name__", "str")

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_switch_or_empty = action.nargs == 0 or action.default in (None, "")
        return action.help if is_switch_or_empty else super()._get_help_string(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        spellings = {spelling.lstrip("-").replace("-", "_"): spelling for spelling in reversed(action.option_strings)}
        value = "" if action.nargs == 0 else self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(reversed(spellings.values()))} {value}".rstrip()


class OneSentenceParser(argparse.ArgumentParser):
    """A parser that refuses in one sentence, as the rest does, and names the option or choice that was probably meant.

    That may also be one of `further_options`, which another parser reads before this one.
    """

    def __init__(self, *args: Any, further_options: Iterable[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": ReadableHelp, **kwargs})
        self.further_options = list(further_options)

    @property
    def options(self) -> list[str]:
        """Every spelling of every option."""
        return list(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        end = " --help lists the options." if message.endswith("?") else "; --help lists the options"
        self.exit(2, f"error: {shortened(without_secrets(message))}{end}\n")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Return the options' values; exit with code 2 where one is unknown."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse_unknown(unknown)
        return parsed

    def refuse_unknown(self, unknown: Sequence[str]) -> NoReturn:
        """Exit with code 2, and name the option that is closest to the first unknown one."""
        known = {option.lstrip("-"): option for option in (*self.options, *self.further_options)}
        asked = unknown[0].lstrip("-").partition("=")[0]
        parts = (name for name in known if len(asked) > 3 and asked in name)  # --epoch: num_train_epochs
        meant = closest(asked, known) or next(parts, "") if unknown[0].startswith("-") else ""
        question = f": did you mean {known[meant]}?" if meant else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{question}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known, meant = ", ".join(map(str, action.choices)), closest(value, action.choices)
            question = f": did you mean {meant}?" if meant else ""
            raise argparse.ArgumentError(action, f"{value!r} is none of its choices ({known}){question}")


class AsWritten(yaml.SafeLoader):
    """Reads a plain value as the text that it is written as: YAML itself makes False of `no`, and 750 of `12:30`."""

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node:
        """Return the next node; an alias is refused, as a few lines of them make a value of any size."""
        if self.check_event(yaml.AliasEvent):
            raise ValueError(f"the alias *{self.peek_event().anchor} stands where a value should be")
        return super().compose_node(parent, index)


for _kind in ("bool", "int", "float", "timestamp"):
    AsWritten.add_constructor(f"tag:yaml.org,2002:{_kind}", AsWritten.construct_scalar)


class SettingsParser(OneSentenceParser, TrlParser):
    """TRL's parser: options from the fields of dataclasses, with dashes or underscores; `--config FILE` reads YAML."""

    def __init__(self, groups: Sequence[type], further_options: Iterable[str] = (), **kwargs: Any) -> None:
        super().__init__(
            dataclass_types=groups, further_options=("--config", *further_options), formatter_class=ReadableHelp,
            usage="%(prog)s [--option VALUE ...]", **kwargs,
        )  # fmt: skip
        self.add_argument(
            "--no_gradient_checkpointing", "--no-gradient-checkpointing", dest="gradient_checkpointing",
            action="store_false", default=None, help="Keep activations.",
        )  # fmt: skip

    def settings(self, arguments: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the value of every option, by its name; exit with code 2, or refuse the YAML file, if wrong."""
        of_file = OneSentenceParser(add_help=False)
        of_file.add_argument("--config", action="append", default=[])
        named, arguments = of_file.parse_known_args(arguments)
        unknown = [word for file in named.config for word in self.set_defaults_with_config(**self._read(file))]
        *parsed, others = self.parse_args_into_dataclasses(
            arguments, return_remaining_strings=True, look_for_args_file=False
        )
        if unknown := [*unknown, *others]:
            self.refuse_unknown(unknown)
        return {name: value for group in parsed for name, value in vars(group).items()}

    def _read(self, file: str) -> dict[str, Any]:
        """Return the values of a YAML file by their names, as the command line would have them."""
        with reading(f"--config {file}", "Write `name: value` lines."):
            try:
                with Path(file).expanduser().open("rb") as stream:
                    found = AsWritten(stream).get_single_data()
            except yaml.YAMLError as error:  # whose first line does not say where
                raise ValueError(" ".join(str(error).split())) from None
        if not isinstance(found, dict):
            raise BadInputError(f"--config {file} has no names with values: write `name: value` lines.")
        if "env" in found:  # TRL would set it, and a module that PYTHONPATH leads to would run
            raise BadInputError(f"--config {file} has env, but sets no variables: set them where you start the run.")
        for name in found.keys() & {"reward", "run_folder"}:
            raise BadInputError(f"--config {file} has {name}, which leads to code to run: pass --{name} yourself.")
        values = {str(name): value for name, value in found.items()}
        for option in self._actions:
            value = values.get(option.dest)
            if isinstance(option, argparse._AppendAction):
                values |= {option.dest: [value]} if isinstance(value, str) else {}
            elif not isinstance(value, str | bool | None):
                raise BadInputError(f"--config {file}: {option.dest} takes one value: write names with commas between.")
            elif option.const is True and isinstance(value, str):  # a switch
                values[option.dest] = yaml.SafeLoader.bool_values.get(value.lower(), value)
        return values


def settings_parser(defaults: RunConfig, **for_argparse: Any) -> SettingsParser:
    """Return a parser of every setting of a run, with those of `defaults`; the rest is what `SettingsParser` takes."""
    about = {"description": "Settings of this run; --config FILE reads them from YAML.", **for_argparse}
    parser = SettingsParser(GROUPS, **about)
    parser.set_defaults(**defaults.to_dict())
    return parser


def parse_overrides(
    defaults: RunConfig, arguments: Sequence[str] | None = None, further_options: Iterable[str] = ()
) -> RunConfig:
    """Return `defaults` with the settings of the command line, or of its YAML file, as `RunConfig.changed_to` does.

    `further_options` are those that the caller has read already.
    """
    asked = settings_parser(defaults, further_options=further_options).settings(arguments)
    changes = {name: value for name, value in asked.items() if value != getattr(defaults, name)}
    is_rate_asked = asked["learning_rate"] is not defaults.learning_rate  # argparse returns the default itself
    if "model" in changes and not is_rate_asked and defaults.goal.learns_answers:
        changes["learning_rate"] = BY_MODEL
    return defaults.changed_to(**changes)
