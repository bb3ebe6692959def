from lit_gpt_dist.cli import console_script

if __name__ == "__main__":
    console_script()
