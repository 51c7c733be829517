"""Which addresses may be read: names, ports, forms, and what they resolve to."""

from __future__ import annotations

import pytest

from enginehouse.pipeline.media.fetching import AddressRefused, check_addresses, is_allowed_host, is_public, read_url


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nonsense",
        "ftp://a.example/x",
        "http:///x",
        "http://",
        "http://a.example\\@evil.example/",
        "http://a.example /x",
        "http://a.example/\r\nx: y",
        "http://user@a.example/",
        "http://user:word@a.example/",
        "http://:80/",
        "http://a.example:99999/",
        "http://a.example:x/",
        "http://a_.-/",
        "http://[::1%25lo]/",
        "http://[::1/",
        "http://ä.example/",
        "http://a.example/" + "x" * 5000,
    ],
)
def test_malformed_addresses_are_refused(url: str) -> None:
    with pytest.raises(AddressRefused):
        read_url(url)


def test_addresses_are_parsed() -> None:
    target = read_url("HTTPS://Images.Example:8443/a/b.png?size=1&x=2#part")

    assert (target.scheme, target.host, target.port) == ("https", "images.example", 8443)
    assert target.path == "/a/b.png?size=1&x=2"
    assert target.authority == "images.example:8443"
    assert read_url("http://[2001:db8::1]").authority == "[2001:db8::1]"
    assert read_url("http://a.example.").host == "a.example"


@pytest.mark.parametrize(
    ("url", "allowed", "expected"),
    [
        ("https://a.example/", ("a.example",), True),
        ("https://A.Example/", ("a.example",), True),
        ("https://a.example./", ("a.example",), True),
        ("https://a.example/", ("A.Example",), True),
        ("https://b.a.example/", ("a.example",), False),
        ("https://b.a.example/", (".a.example",), True),
        ("https://a.example/", (".a.example",), False),
        ("https://ba.example/", (".a.example", "a.example"), False),
        ("https://a.example:8443/", ("a.example",), False),
        ("https://a.example:8443/", ("a.example:8443",), True),
        ("https://a.example/", ("a.example:8443",), False),
        ("https://a.example:22/", ("*",), False),
        ("https://whatever.example/", ("*",), True),
        ("https://a.example/", (), False),
    ],
)
def test_hosts_are_allowed_by_name_and_port(url: str, allowed: tuple[str, ...], expected: bool) -> None:
    assert is_allowed_host(read_url(url), allowed) is expected


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
        *("100.64.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1"),
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fec0::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2002:0a00:1::"),
    ],
)
def test_addresses_inside_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "64:ff9b::101:101"])
def test_addresses_outside_are_public(address: str) -> None:
    assert is_public(address)


def test_one_address_inside_refuses_all() -> None:
    assert check_addresses(["1.1.1.1", "1.1.1.1"], allow_private=False) == ["1.1.1.1"]
    assert check_addresses(["1.1.1.1", "10.0.0.1"], allow_private=True) == ["1.1.1.1", "10.0.0.1"]
    for addresses in (["1.1.1.1", "10.0.0.1"], ["10.0.0.1"], []):
        with pytest.raises(AddressRefused):
            check_addresses(addresses, allow_private=False)
