"""Calls of a page, as a browser makes them."""

import aiohttp


async def opens(url: str, cookie: str = "") -> tuple[int, str]:
    """The answer's status and cookie for a browser that has no other cookie."""
    headers = {"Cookie": cookie} if cookie else {}
    jar = aiohttp.DummyCookieJar()
    async with aiohttp.ClientSession(cookie_jar=jar) as session, session.get(url, headers=headers) as response:
        return response.status, response.headers.get("Set-Cookie", "").split(";")[0]
