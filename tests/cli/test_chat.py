"""`jaxserve chat`."""

import io

import pytest
from click.testing import CliRunner
from rich.console import Console

from jaxserve.cli.chat import Chat, statistics
from jaxserve.cli.main import main
from jaxserve.outputs import CompletionOutput, RequestOutput, RequestTimings
from jaxserve.sampling_params import SamplingParams


def piped(*lines: str, args: tuple[str, ...] = ()):
    return CliRunner().invoke(main, ["chat", "some/model", "--max-tokens", "2", *args], input="\n".join(lines))


@pytest.fixture
def chat(fake_llm):
    screen = io.StringIO()
    chat = Chat(fake_llm("m"), SamplingParams(max_tokens=3), None, Console(file=screen), interactive=True)
    chat.screen = screen
    return chat


def test_piped_input_prints_answers_only(fake_llm):
    result = piped("Hello", "And you?")
    assert result.exit_code == 0, result.output
    assert result.stdout == " word word\n word word\n"
    assert fake_llm.instances[0].closed


def test_piped_messages_that_are_refused_fail_the_run(fake_llm):
    result = piped("too long", "Hello")
    assert result.exit_code == 1
    assert result.stdout == " word word\n"
    assert "at most 1024 fit" in result.stderr


def test_piped_input_that_is_not_utf_8(fake_llm):
    result = CliRunner().invoke(main, ["chat", "m"], input=b"M\xfcsli\n")
    assert result.exit_code == 2
    assert "standard input is not UTF-8 text (byte 0xfc" in result.stderr


def test_the_conversation_grows_by_whole_turns(fake_llm):
    piped("Hello", "And you?", args=("--system", "Be brief."))
    first, second = (call[1] for call in fake_llm.instances[0].calls)
    assert first == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert second == [*first, {"role": "assistant", "content": " word word"}, {"role": "user", "content": "And you?"}]


def test_reset_forgets_the_turns_and_keeps_the_system_prompt(fake_llm):
    piped("Hello", "/reset", "Again", args=("--system", "Be brief."))
    assert fake_llm.instances[0].calls[1][1] == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Again"}]


def test_exit_ends_before_the_rest_is_read(fake_llm):
    piped("Hello", "/exit", "Again")
    assert len(fake_llm.instances[0].calls) == 1


def test_an_interrupt_stops_the_answer_and_keeps_what_was_said(chat):
    chat.llm.interrupt_after = 2
    chat.say("Hello")
    assert chat.llm.aborted == 1
    assert chat.turns[-1] == {"role": "assistant", "content": " word word"}
    chat.llm.interrupt_after = None
    chat.say("Go on")
    assert chat.turns[-1] == {"role": "assistant", "content": " word word word"}


def test_an_answer_stopped_before_its_first_word_leaves_no_trace(chat):
    chat.llm.interrupt_after = 0
    chat.say("Hello")
    assert chat.turns == []


def test_a_refused_message_is_dropped_and_the_chat_goes_on(chat):
    chat.say("too long")
    assert "at most 1024 fit" in chat.screen.getvalue()
    assert chat.turns == []
    chat.say("Hello")
    assert len(chat.turns) == 2


def test_commands_answer(chat):
    assert chat._command("/system Be kind.")
    assert chat.turns == [{"role": "system", "content": "Be kind."}]
    assert chat._command("/help")
    assert chat._command("/nonsense")
    assert "there is no /nonsense" in chat.screen.getvalue()
    assert not chat._command("/exit")


def test_statistics_of_an_answer():
    output = RequestOutput("0", None, [1] * 30, [CompletionOutput(0, "", [1] * 11, "stop")], num_cached_tokens=16,
                           timings=RequestTimings(queue=0.0, first_token=0.5, total=1.0))
    assert statistics(output) == "11 tokens, 20.0 tok/s, first after 0.50 s, 16 of 30 prompt tokens cached"
