"""With which environment variables the zygote starts."""

from __future__ import annotations

import os

from distlab.runner import surroundings


def test_a_name_server_that_does_not_answer_is_asked_for_a_second_at_a_time() -> None:
    found = surroundings.of_zygote({"HOME": "/home/ada"})
    assert found["RES_OPTIONS"].split() == ["timeout:1", "attempts:2"]
    assert found["HOME"] == "/home/ada"


def test_what_the_user_says_of_name_servers_stays() -> None:
    said = {"RES_OPTIONS": "rotate"}
    assert surroundings.of_zygote(said)["RES_OPTIONS"] == "rotate"


def test_the_working_folder_is_no_place_of_modules() -> None:
    path = os.pathsep.join([os.getcwd(), "/opt/tools"])
    assert surroundings.of_zygote({"PYTHONPATH": path})["PYTHONPATH"] == "/opt/tools"
